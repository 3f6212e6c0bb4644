"""creek's wire: changes as Avro with fingerprints, as github.com/modfin/creek at b88e46c reads them."""
