"""The command `dovetail convert`.

convert_command     the command
convert_options     its options
run                 its steps
checkpoint_source   the tensors of the model, by the names of Hugging Face checkpoints
recorded_weights    the tensors of any weight loader: records what it writes to a model
shard_writer        writes the shards and their index
model_files         config.json, the tokenizer and other files
"""
