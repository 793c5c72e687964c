"""What devices have in common that compute behind the host's back, each with a module in torch.

Their platforms add what differs: whether they are there, what they can do, how ranks are joined.
Importing this package imports no torch: a platform's probe reads `torch_build`.
"""
