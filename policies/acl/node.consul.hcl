# The node daemon: registers `dsec-node`, and health by prefix; sees nothing of other services.
service "dsec-node" {
  policy = "write"
}

service_prefix "dsec-sandbox" {
  policy = "write"
}

# Sessions are bound to this client's agent; replace the prefix by the node's name where each node has its own token.
session_prefix "" {
  policy = "write"
}

key_prefix "dsec/nodes/" {
  policy = "write"
}

node_prefix "" {
  policy = "read"
}
