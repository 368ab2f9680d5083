"""The report that people look at: records as one HTML page that opens offline, or as pictures."""
