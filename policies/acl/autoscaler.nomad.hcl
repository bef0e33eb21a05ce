# Whoever scales pools: the count of jobs in the namespace, and where there is room.
namespace "default" {
  policy       = "read"
  capabilities = ["scale-job", "read-job-scaling"]
}

node {
  policy = "read"
}
