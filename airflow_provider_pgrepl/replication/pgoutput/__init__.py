"""The parser of pgoutput, protocol version 1: control messages in plain Python, rows into columns in bulk.

It has no side effects. Any bytes give messages or a WireError. The receiver, not this package, checks that
transactions arrive in commit order, and that the relation of each row is known.
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""
