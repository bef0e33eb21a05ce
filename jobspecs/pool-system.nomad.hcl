# Capacity lent to node daemons: one slice on every client of a node pool, whatever its size is named here.

variable "node_pool" {
  type    = string
  default = "default"
}

variable "cores" {
  type    = number
  default = 2
}

variable "memory_mib" {
  type    = number
  default = 4096
}

job "dsec-pool-system" {
  type      = "system"
  node_pool = var.node_pool
  # Lower than anything: system jobs above it preempt it by default.
  priority = 10

  group "slice" {
    task "slice" {
      driver       = "dsec-pool"
      kill_timeout = "30s"

      config {
        cpus       = var.cores
        memory_mib = var.memory_mib
      }

      # Whole cores: Nomad's count and the grant then agree without a conversion from MHz.
      resources {
        cores  = var.cores
        memory = var.memory_mib
      }
    }
  }
}
