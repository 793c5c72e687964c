"""The Messages API of Anthropic: fields, content blocks, and the form of messages and events."""
