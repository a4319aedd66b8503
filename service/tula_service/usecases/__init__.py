"""The use cases, one file per API resource: authorise, load data, analyse it without a transaction, then store."""
