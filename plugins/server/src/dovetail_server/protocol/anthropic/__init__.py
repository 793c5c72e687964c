"""The Messages API of Anthropic: fields, content blocks, and the format of messages and events."""
