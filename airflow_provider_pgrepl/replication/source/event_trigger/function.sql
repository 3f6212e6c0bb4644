-- The PL/pgSQL of the function behind the event triggers, in pieces: each begins at a line `--: name`, and goes where
-- another one says <name>. What else stands in <> is filled in by function.py, by pipeline and server version.

--: body
#variable_conflict use_column
DECLARE
    _publication record;
    _command record;
    _head jsonb;
    _table jsonb;
    _relations oid[] := '{}';
    _types oid[] := '{}';
    _left oid[] := '{}';
    _gone jsonb[] := '{}';
    _all boolean := false;
    _index boolean := false;
    _member boolean := false;
    _relation oid;
    _type oid;
    _asked oid[];
    _oids oid[];
    _leaves oid[];
    _row_types oid[];
    _enums oid[];
    _text text;
    _found json;
    _rows json;
    _key bytea;
    _said bytea;
BEGIN
    IF current_setting('wal_level') <> 'logical' OR (TG_EVENT = 'sql_drop' AND TG_TAG IN <by_alter>) THEN
        RETURN;
    END IF;
    SELECT key INTO STRICT _key FROM <key_table>;
    _head := jsonb_build_object('tag', TG_TAG);
    SELECT * INTO _publication FROM pg_publication WHERE pubname = <publication>;
    IF NOT FOUND THEN
        IF TG_TAG LIKE '%PUBLICATION' THEN
            _said := convert_to(_head::text, 'UTF8');
            PERFORM <emit>;
            PERFORM pg_logical_emit_message(true, <prefix>, '');
        END IF;
        RETURN;
    END IF;
    _head := _head || jsonb_build_object('format', <format>, 'trigger', <identity>,
        'server', current_setting('server_version_num')::int);
    IF TG_EVENT = 'sql_drop' THEN
<dropped>
    ELSE
<ended>
    END IF;
    FOREACH _table IN ARRAY _gone LOOP
        _said := convert_to((_head || _table)::text, 'UTF8');
        PERFORM <emit>;
    END LOOP;
    IF cardinality(_relations) + cardinality(_types) > 0 THEN
<reached>
        _relations := coalesce(_oids, '{}');
    END IF;
<moved>
    IF _all OR _index OR cardinality(_gone) > 0 THEN
        _asked := CASE WHEN _all THEN ARRAY(SELECT oid FROM pg_class WHERE relkind IN ('r', 'p'))
            -- Nothing says what had lost an index or a partition. But DROP has locked it, until the transaction ends.
            ELSE ARRAY(SELECT DISTINCT coalesce(a.relid, c.oid) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
                LEFT JOIN LATERAL pg_partition_ancestors(c.oid) AS a (relid) ON c.relkind = 'p'
                WHERE l.pid = pg_backend_pid() AND l.mode IN ('AccessExclusiveLock', 'ShareUpdateExclusiveLock')
                    AND (_index AND c.relreplident = 'i' OR cardinality(_gone) > 0 AND c.relkind = 'p')) END;
<published>
        _relations := _relations || coalesce(_oids, '{}');
    END IF;
    IF cardinality(_relations) > 0 THEN
        _asked := _relations;
<published>
        _relations := coalesce(_oids, '{}');
    END IF;
    IF TG_TAG IN <may_rewrite> AND cardinality(_relations || _left) > 0 THEN
        -- Of other statements in the same text, and of functions, it is not known what they do. The text of a migration
        -- may be long, and is the same for each of its statements: it is not searched then.
        _text := current_query();
        _head := _head || jsonb_build_object('using', octet_length(_text) > <most_text>
            OR _text !~* 'alter[[:space:]]+table'
            OR _text ~* '\y(select|call|do|execute)\y' OR _text ~* '\ytype\y[^;]*\yusing\y'
            OR regexp_replace(_text, '--[^\n]*|/\*.*?\*/', ' ', 'g') ~* '\ytype\y[^;]*\yusing\y');
    END IF;
    FOR _relation IN SELECT DISTINCT unnest(_relations || _left) ORDER BY 1 LOOP
        _table := _head || jsonb_build_object('oid', _relation::bigint);
        _rows := NULL;
        IF current_setting('transaction_isolation') = 'read committed' THEN
            _oids := ARRAY[_relation];
<facts>
        END IF;
        _text := _table;
        -- Put together as text: the rows may be many, and take long to be read as jsonb.
        _said := convert_to(coalesce(left(_text, -1) || ', "rows": ' || _rows || '}', _text), 'UTF8');
        PERFORM <emit>;
    END LOOP;
    -- To the decoder a message stands at the end of its record, where the next record begins. When that is of
    -- another subtransaction, which of them comes first is left to chance: so none that counts comes last.
    IF cardinality(_relations || _left) + cardinality(_gone) > 0 THEN
        PERFORM pg_logical_emit_message(true, <prefix>, '');
    END IF;
EXCEPTION WHEN OTHERS THEN
    BEGIN
        IF _key IS NULL THEN
            PERFORM pg_logical_emit_message(true, <prefix>, jsonb_build_object('pipeline', <pipeline>)::text);
        ELSE
            _said := convert_to('{}', 'UTF8');
            PERFORM <emit>;
        END IF;
        PERFORM pg_logical_emit_message(true, <prefix>, '');
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
END

--: ended
    FOR _command IN SELECT classid, objid, command_tag FROM pg_event_trigger_ddl_commands() LOOP
        IF _command.classid = 'pg_class'::regclass THEN
            _relations := _relations || _command.objid;
        ELSIF _command.classid = 'pg_type'::regclass THEN
            _types := _types || _command.objid;
        ELSIF _command.classid = 'pg_namespace'::regclass AND _command.command_tag = 'ALTER SCHEMA' THEN
            _relations := _relations || ARRAY(SELECT oid FROM pg_class WHERE relnamespace = _command.objid
                AND relkind IN ('r', 'p'));
        ELSIF _command.classid = 'pg_publication_rel'::regclass THEN
            _relations := _relations || ARRAY(SELECT prrelid FROM pg_publication_rel
                WHERE oid = _command.objid AND prpubid = _publication.oid);
        ELSIF _command.classid = 'pg_publication'::regclass AND _command.objid = _publication.oid THEN
            _all := true;
        <namespaces>
        END IF;
    END LOOP;

--: namespaces
ELSIF _command.classid = 'pg_publication_namespace'::regclass THEN
            _relations := _relations || ARRAY(SELECT c.oid FROM pg_publication_namespace m
                JOIN pg_class c ON c.relnamespace = m.pnnspid AND c.relkind IN ('r', 'p')
                WHERE m.oid = _command.objid AND m.pnpubid = _publication.oid);

--: dropped
    FOR _command IN SELECT * FROM pg_event_trigger_dropped_objects() WHERE NOT is_temporary LOOP
        IF _command.object_type = 'table' AND _command.schema_name <> '_pgrepl' THEN
            _gone := _gone || jsonb_build_object('oid', _command.objid::bigint, 'gone', true,
                'schema', _command.schema_name, 'name', _command.object_name);
        ELSIF _command.object_type = 'index' THEN
            _index := true;
        ELSIF _command.classid = 'pg_class'::regclass AND _command.objsubid > 0 THEN
            _relations := _relations || _command.objid;
        ELSIF _command.object_type LIKE 'publication %' AND _command.address_args[1] = <publication> THEN
            _member := true;
            -- By its name through the index: there may be as many of these as tables that one statement drops.
            IF _command.address_names[2] IS NOT NULL THEN
                _left := _left || ARRAY(SELECT c.oid FROM pg_class c WHERE c.relname = _command.address_names[2]
                    AND c.relnamespace = (SELECT n.oid FROM pg_namespace n
                        WHERE n.nspname = _command.address_names[1]) AND c.relkind IN ('r', 'p'));
            ELSE
                _left := _left || ARRAY(SELECT c.oid FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
                    WHERE n.nspname = _command.address_names[1] AND c.relkind IN ('r', 'p'));
            END IF;
        END IF;
    END LOOP;
    -- Nothing says any more whether it was published. Partitions are not members themselves.
    IF NOT (_member OR _publication.puballtables <or_schemas> OR EXISTS (SELECT FROM pg_publication_rel m
            JOIN pg_class c ON c.oid = m.prrelid WHERE m.prpubid = _publication.oid AND c.relkind = 'p')) THEN
        _gone := '{}';
    END IF;

--: or_schemas
OR EXISTS (SELECT FROM pg_publication_namespace m
            WHERE m.pnpubid = _publication.oid)

--: reached
-- Tables above and below by inheritance; and those that have a column of a type, or of one made of it. By arrays,
-- a level at a time: a recursive query would look into each index once for every partition.
    _oids := _relations;
    _asked := _relations;
    WHILE cardinality(_asked) > 0 LOOP
        _asked := ARRAY(SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (_asked)
            EXCEPT SELECT unnest(_oids));
        _oids := _oids || _asked;
    END LOOP;
    _types := _types || ARRAY(SELECT reltype FROM pg_class WHERE oid = ANY (_oids) AND reltype <> 0);
    _asked := _types;
    WHILE cardinality(_asked) > 0 LOOP
        _asked := ARRAY(SELECT CASE WHEN d.classid = 'pg_type'::regclass THEN d.objid ELSE c.reltype END
            FROM pg_depend d LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
            WHERE d.refclassid = 'pg_type'::regclass AND d.refobjid = ANY (_asked)
                AND (d.classid = 'pg_type'::regclass OR c.reltype <> 0)
            EXCEPT SELECT unnest(_types));
        _types := _types || _asked;
    END LOOP;
    -- What is above the tables below has been found: a partition has one parent.
    _asked := _relations || ARRAY(SELECT typrelid FROM pg_type WHERE oid = ANY (_types) AND typrelid <> 0
        EXCEPT SELECT unnest(_oids));
    _oids := _oids || _asked;
    WHILE cardinality(_asked) > 0 LOOP
        _asked := ARRAY(SELECT i.inhparent FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid
            WHERE c.oid = ANY (_asked) AND c.relispartition EXCEPT SELECT unnest(_oids));
        _oids := _oids || _asked;
    END LOOP;

--: moved
-- What leaves a published schema is no longer published; nothing says any more that it was. By SET SCHEMA, that is:
    -- other DDL would be told of for each partition. Of functions, and of background workers, it is not known.
    IF TG_TAG = 'ALTER TABLE' AND EXISTS (SELECT FROM pg_publication_namespace m
            WHERE m.pnpubid = _publication.oid) THEN
        _text := coalesce(current_query(), '');
        IF octet_length(_text) > <most_text> OR _text ~* 'schema' OR _text !~* 'alter[[:space:]]+table'
                OR _text ~* '\y(select|call|do|execute)\y' THEN
            _left := _left || ARRAY(SELECT c.oid FROM pg_class c WHERE c.oid = ANY (_relations)
                AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't');
        END IF;
    END IF;

--: published
-- With publish_via_partition_root the stream knows the uppermost published table alone, else the lowest. So by the
-- root only members themselves count, which most partitions are not: these are left out before the way up is walked.
    WITH RECURSIVE above (oid, published, depth) AS (
        SELECT c.oid, c.oid, 0 FROM pg_class c WHERE c.oid = ANY (_asked)
            AND (NOT _publication.pubviaroot OR (_publication.puballtables AND NOT c.relispartition)
                OR EXISTS (SELECT FROM pg_publication_rel m
                    WHERE m.prpubid = _publication.oid AND m.prrelid = c.oid) <schemas>)
        UNION ALL
        SELECT above.oid, i.inhparent, above.depth + 1
        FROM above JOIN pg_class c ON c.oid = above.published AND c.relispartition
            JOIN pg_inherits i ON i.inhrelid = above.published
    ), member (oid, top) AS (
        SELECT above.oid, max(above.depth) FROM above JOIN pg_class c ON c.oid = above.published
        WHERE _publication.puballtables
            OR EXISTS (SELECT FROM pg_publication_rel m
                WHERE m.prpubid = _publication.oid AND m.prrelid = above.published)
            <schemas>
        GROUP BY above.oid
    )
    SELECT array_agg(c.oid) INTO _oids FROM member m JOIN pg_class c ON c.oid = m.oid
        JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname <> '_pgrepl' AND c.oid >= 16384
        AND CASE WHEN _publication.pubviaroot THEN m.top = 0 ELSE c.relkind = 'r' END;

--: schemas
OR EXISTS (SELECT FROM pg_publication_namespace m
                WHERE m.pnpubid = _publication.oid AND m.pnnspid = c.relnamespace)

--: facts
            _types := ARRAY(SELECT DISTINCT atttypid FROM pg_attribute
                WHERE attrelid = _relation AND attnum > 0 AND NOT attisdropped);
            _enums := ARRAY(<enums>);
            _row_types := '{}';
            FOREACH _type IN ARRAY _types LOOP
                IF _type >= 16384 AND EXISTS (<made_of_rows>) THEN
                    _row_types := _row_types || _type;
                END IF;
            END LOOP;
            _found := <leaves>;
            _leaves := ARRAY(SELECT (leaf ->> 2)::oid FROM json_array_elements(_found) AS leaf);
            _rows := json_build_object('leaves', _found, <rows>);

--: of_kind
SELECT wanted.oid FROM wanted WHERE (SELECT t.typtype FROM pg_type t WHERE t.oid = wanted.oid) = '<kind>'

--: rows
(SELECT coalesce(json_agg(json_build_array(<columns>)), '[]') FROM (<query>) AS r (<columns>))
