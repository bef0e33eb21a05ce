"""Small functions for logs."""
