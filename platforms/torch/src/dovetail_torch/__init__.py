"""The torch layer of Dovetail: worker, model runner, sampler, layers and weight loading."""
