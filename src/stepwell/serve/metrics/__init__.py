"""The well's page for Prometheus."""
