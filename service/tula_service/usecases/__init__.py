"""One file for each resource of the API: authorise, load, analyse without a transaction, then store."""
