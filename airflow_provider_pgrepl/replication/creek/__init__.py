"""creek's wire: changes in Avro with fingerprints, in the form that github.com/modfin/creek at b88e46c
reads."""
