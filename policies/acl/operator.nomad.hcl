# Whoever runs the jobs of jobspecs/. No alloc-node-exec: exec reaches sandboxes only, never the host.
namespace "default" {
  policy       = "read"
  capabilities = ["submit-job", "dispatch-job", "read-logs", "read-fs", "alloc-exec", "alloc-lifecycle", "scale-job"]
}

node {
  policy = "read"
}

agent {
  policy = "read"
}
