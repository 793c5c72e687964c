"""A grammar plugin with the library xgrammar, which is an optional dependency.

backend   the plugin: compiles grammars, follows tokens, fills masks
forms     translates the forms of grammars
schemas   refuses schemas that the library would not enforce
probe     tells whether the library is installed
"""
