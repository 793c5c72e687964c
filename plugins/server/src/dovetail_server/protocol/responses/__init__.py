"""The Responses API: fields, items, and the format of responses and events."""
