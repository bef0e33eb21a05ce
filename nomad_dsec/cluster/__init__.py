"""Nomad, Consul and Vault; the only importer of their libraries."""
