"""What all object stores share: `ObjectStore` over the requests of one service (S3, Google Cloud Storage, Azure)."""
