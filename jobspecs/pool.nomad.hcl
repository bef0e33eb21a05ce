# Capacity lent to node daemons: each allocation is a slice of cpu and memory for sandboxes on the client where it runs.
# Scale it like any job (`nomad job scale dsec-pool slices 20`); a slice that is stopped, drained or preempted is taken
# back: no new sandboxes at once, best_effort ones go first, the rest when kill_timeout is over.

variable "slices" {
  type    = number
  default = 1
}

job "dsec-pool" {
  type = "service"
  # Below services and batch jobs that matter, so that these may preempt it (service preemption must be switched on in
  # the scheduler configuration; for system jobs it is on).
  priority = 20

  group "slices" {
    count = var.slices

    # A grant does not fail by itself; when its node daemon is away, wait for it.
    restart {
      attempts = 5
      interval = "5m"
      delay    = "5s"
      mode     = "delay"
    }

    scaling {
      enabled = true
      min     = 0
      max     = 1000
    }

    task "slice" {
      driver = "dsec-pool"
      # How long sandboxes that are not best_effort may go on after a stop; the client's max_kill_timeout bounds it.
      kill_timeout = "30s"

      # Lends what is asked for here: the share of the machine's MHz as cores, and the memory.
      config {}

      resources {
        cpu    = 4000
        memory = 8192
      }
    }
  }
}
