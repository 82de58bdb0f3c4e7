"""Files and data sets, read as a stream of records."""
