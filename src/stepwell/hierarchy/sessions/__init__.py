"""Connected engines: sessions and their members, namespaces and keys, shares, and namespaces in quarantine."""
