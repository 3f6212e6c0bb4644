"""Operations on a pipeline: pause, retry and remove tables, skip a transaction, tear the pipeline down."""
