# Whoever scales pools: only the leader acts.
session_prefix "" {
  policy = "write"
}

key "dsec/leader/autoscaler" {
  policy = "write"
}

service_prefix "dsec-" {
  policy = "read"
}
