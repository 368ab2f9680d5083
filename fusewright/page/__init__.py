"""The benchmark report: records as one HTML page that opens offline, or as PNG files."""
