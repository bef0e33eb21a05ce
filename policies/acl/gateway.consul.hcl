# The gateway: finds node daemons and registers itself.
service "dsec-gateway" {
  policy = "write"
}

service_prefix "dsec-" {
  policy = "read"
}

node_prefix "" {
  policy = "read"
}

key_prefix "dsec/nodes/" {
  policy = "read"
}
