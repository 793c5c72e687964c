"""The command `dovetail convert`.

convert_command     the command
convert_options     the options of the command
run                 the steps of the command
checkpoint_source   the tensors of the model, with the names of its Hugging Face checkpoint
recorded_weights    the tensors of any weight loader: records what it writes to a model
shard_writer        writes the shards and their index
model_files         config.json, the tokenizer and other files
"""
