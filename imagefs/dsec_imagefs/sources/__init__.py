"""Where images come from: directories, OCI layouts, docker archives, registries, Docker engines, debootstrap."""
