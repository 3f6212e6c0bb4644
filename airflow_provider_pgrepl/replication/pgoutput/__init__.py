"""pgoutput's bytes, protocol version 1: control messages in plain Python, rows split into columns in bulk.

Pure and total: any bytes give messages or a WireError. What is not checked here: that transactions come in
order, and that a row's relation is known; both are the receiver's.
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""
