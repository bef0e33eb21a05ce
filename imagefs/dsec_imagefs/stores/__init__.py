"""Where published images live: a directory, an S3 bucket, a repository of a registry. One protocol, `base.Store`."""
