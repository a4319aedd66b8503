"""What benchmarks, experiments and tests share: a service, a database, a cluster of namespaces, a browser."""
