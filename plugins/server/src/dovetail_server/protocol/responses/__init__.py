"""The Responses API: fields, items, and the form of responses and events."""
