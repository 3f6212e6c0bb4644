-- creek's functions, by its names: a table joins the publication, or leaves it, and who listens is told.
CREATE SCHEMA IF NOT EXISTS _creek;

CREATE FUNCTION _creek.add_table(pub text, _tbl regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Between two of its writers: else whether changes of who has begun to write it are sent is left to chance.
    EXECUTE pg_catalog.format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', _tbl);
    EXECUTE pg_catalog.format('ALTER PUBLICATION %I ADD TABLE %s', pub, _tbl);
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('ADD ', _tbl));
END
$$;

CREATE FUNCTION _creek.remove_table(pub text, _tbl regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE pg_catalog.format('ALTER PUBLICATION %I DROP TABLE %s', pub, _tbl);
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('REMOVE ', _tbl));
END
$$;
