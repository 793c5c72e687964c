"""Structured output with the library xgrammar: the `xgrammar` grammar plugin.

backend     the plugin: compiles grammars, follows tokens, fills masks
vocabulary  the tokens of a model in the form that the library reads
forms       compiles the forms of grammars
schemas     translates JSON schemas to the part of JSON Schema that the library enforces
types       translates the keywords of one JSON type
exclusion   checks whether the schemas of `oneOf` exclude each other
recursion   checks the references of a schema
regexes     translates regular expressions
ebnf        checks grammars
probe       checks whether the library is installed
"""
