"""A run in the browser: a server on loopback over the record, its own static files, and the export of one episode as a single file."""
