"""The use cases, one file per API resource. Each authorises, loads data, analyses it, and stores the result."""
