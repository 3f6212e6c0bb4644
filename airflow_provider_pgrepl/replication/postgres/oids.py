"""OIDs of PostgreSQL's built-in types, which are the same in every database and version.

https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat
"""

from __future__ import annotations

BOOL = 16
BYTEA = 17
CHAR = 18
"""`"char"`, one byte."""
INT8 = 20
INT2 = 21
INT2VECTOR = 22
INT4 = 23
TEXT = 25
OID = 26
XID = 28
CID = 29
OIDVECTOR = 30
JSON = 114
XML = 142
POINT = 600
FLOAT4 = 700
FLOAT8 = 701
MONEY = 790
BPCHAR = 1042
"""`character(n)`."""
VARCHAR = 1043
DATE = 1082
TIME = 1083
TIMESTAMP = 1114
TIMESTAMPTZ = 1184
INTERVAL = 1186
TIMETZ = 1266
BIT = 1560
VARBIT = 1562
NUMERIC = 1700
UUID = 2950
TSVECTOR = 3614
JSONB = 3802
XID8 = 5069
JSON_TYPES = (JSON, JSONB)
VECTORS = (INT2VECTOR, OIDVECTOR)
"""pg_type lists them as arrays, but their text is not that of an array."""
