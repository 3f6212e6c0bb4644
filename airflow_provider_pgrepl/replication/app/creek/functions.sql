-- creek's functions, by its names: a table joins the publication, or leaves it, and who listens is told.
CREATE SCHEMA IF NOT EXISTS _creek;

CREATE OR REPLACE FUNCTION _creek.add_table(pub text, _tbl regclass) RETURNS void LANGUAGE plpgsql
SET lock_timeout = '500ms' AS $$
DECLARE
    _refused text;
    _holds_locks boolean;
    _limit interval;
    _begin timestamptz := pg_catalog.clock_timestamp();
BEGIN
    -- From the moment it is published the source would refuse UPDATE and DELETE on such a table.
    WITH RECURSIVE below (oid) AS (
        SELECT _tbl::oid
        UNION
        SELECT i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid
    )
    SELECT pg_catalog.string_agg(c.oid::regclass::text, ', ') INTO _refused
    FROM pg_catalog.pg_publication p CROSS JOIN below JOIN pg_catalog.pg_class c ON c.oid = below.oid
        CROSS JOIN LATERAL (
            SELECT coalesce(pg_catalog.array_agg(a.attnum), '{}') AS columns FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND (a.attgenerated = 'v'
                OR a.attgenerated = 's' AND pg_catalog.to_jsonb(p) ->> 'pubgencols' = 'n')
        ) AS unsent
    WHERE p.pubname = pub AND (p.pubupdate OR p.pubdelete) AND c.relkind = 'r' AND CASE c.relreplident
        WHEN 'f' THEN unsent.columns <> '{}'
        ELSE NOT EXISTS (
            SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisvalid
                AND CASE c.relreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate
                    WHEN 'i' THEN i.indisreplident ELSE false END
                AND NOT (i.indkey::int2[])[0 : i.indnkeyatts - 1] && unsent.columns
        ) END;
    IF _refused IS NOT NULL THEN
        RAISE EXCEPTION '% was not added to publication %: the source would refuse UPDATE and DELETE on %,'
            ' which has no replica identity, or generated columns in it that are not published',
            _tbl, pub, _refused
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Give it a primary key or another'
            ' REPLICA IDENTITY. Add a table into which rows are only inserted by ALTER PUBLICATION.';
    END IF;
    -- A transaction that holds locks never waits for another lock here, but tries: it would be a deadlock if
    -- the other session waits for this transaction. Without locks a short wait gets a turn between writers.
    _holds_locks := EXISTS (
        SELECT FROM pg_catalog.pg_locks WHERE pid = pg_catalog.pg_backend_pid() AND granted
            AND locktype <> 'virtualxid' AND NOT (locktype = 'relation' AND relation < 16384)
    );
    _limit := CASE WHEN _holds_locks THEN '2 s' ELSE '10 s' END;
    LOOP
        BEGIN
            -- Between two of its writers: else whether changes of who has begun to write it are sent is left
            -- to chance.
            IF NOT _holds_locks THEN
                EXECUTE pg_catalog.format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', _tbl);
            END IF;
            EXECUTE pg_catalog.format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE NOWAIT', _tbl);
            -- The publication may be locked as well, and that lock cannot be tried.
            PERFORM pg_catalog.set_config('lock_timeout', '10', true);
            EXECUTE pg_catalog.format('ALTER PUBLICATION %I ADD TABLE %s', pub, _tbl);
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            -- The locks of this attempt are released.
            IF pg_catalog.clock_timestamp() - _begin > _limit THEN
                RAISE EXCEPTION '% was not added to publication %: another transaction has held a lock on the'
                    ' table or the publication for %', _tbl, pub, _limit
                    USING ERRCODE = 'lock_not_available', HINT = 'Try again when it has ended.';
            END IF;
        END;
        PERFORM pg_catalog.pg_sleep(0.1);
    END LOOP;
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('ADD ', _tbl));
END
$$;

CREATE OR REPLACE FUNCTION _creek.remove_table(pub text, _tbl regclass) RETURNS void LANGUAGE plpgsql
SET lock_timeout = '500ms' AS $$
DECLARE
    _holds_locks boolean;
    _limit interval;
    _is_last boolean;
    _begin timestamptz := pg_catalog.clock_timestamp();
BEGIN
    -- As in add_table; but the lock conflicts with no writer.
    _holds_locks := EXISTS (
        SELECT FROM pg_catalog.pg_locks WHERE pid = pg_catalog.pg_backend_pid() AND granted
            AND locktype <> 'virtualxid' AND NOT (locktype = 'relation' AND relation < 16384)
    );
    _limit := CASE WHEN _holds_locks THEN '2 s' ELSE '10 s' END;
    LOOP
        _is_last := pg_catalog.clock_timestamp() - _begin > _limit;
        BEGIN
            -- The last wait is for an autovacuum: the server cancels one that is waited for after a second.
            PERFORM pg_catalog.set_config('lock_timeout',
                CASE WHEN _holds_locks THEN '10' WHEN _is_last THEN '1300' ELSE '500' END, true);
            -- A role without these privileges, and the publication's lock, can only try by a wait of 10 ms.
            IF _holds_locks AND pg_catalog.has_table_privilege(_tbl, 'UPDATE, DELETE, TRUNCATE') THEN
                EXECUTE pg_catalog.format('LOCK TABLE %s IN SHARE UPDATE EXCLUSIVE MODE NOWAIT', _tbl);
            END IF;
            EXECUTE pg_catalog.format('ALTER PUBLICATION %I DROP TABLE %s', pub, _tbl);
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            -- The locks of this attempt are released.
            IF _is_last THEN
                RAISE EXCEPTION '% was not removed from publication %: another transaction has held a lock on'
                    ' the table or the publication for %', _tbl, pub, _limit
                    USING ERRCODE = 'lock_not_available', HINT = 'Try again when it has ended.';
            END IF;
        END;
        PERFORM pg_catalog.pg_sleep(0.1);
    END LOOP;
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('REMOVE ', _tbl));
END
$$;
