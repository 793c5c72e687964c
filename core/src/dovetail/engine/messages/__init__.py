"""Messages of a chat model: tool calls and reasoning, separate from the content.

conversation  checks the roles and contents of messages
history       checks the tool calls and tool results in a conversation
parsers       chooses the parser plugins of an engine, and parses the text of a completion
tool_use      checks the tools of a request, and constrains the calls with a grammar
"""
