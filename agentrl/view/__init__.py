"""The page that shows a run: a small server on loopback over the record, static assets of our own, and one episode as a single file."""
