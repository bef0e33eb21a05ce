# One container sandbox as a service: it goes on until it is stopped. `nomad alloc exec`, `logs`, `signal` and `fs` work.

variable "image" {
  type    = string
  default = "debian"
}

job "dsec-container" {
  type = "service"

  group "sandbox" {
    task "main" {
      driver = "dsec-container"
      # Default of the driver; shown because the program must handle it to end by itself.
      kill_signal  = "SIGTERM"
      kill_timeout = "10s"

      config {
        image   = var.image
        command = "sh"
        args    = ["-c", "echo up; trap 'exit 0' TERM; while :; do sleep 1; done"]
        # No network, the default profile: nothing outside can be reached and the host can't be seen.
        policy   = "default"
        network  = "none"
        disk_mib = 512
        pids     = 256
      }

      # Hard limits of the sandbox: its share of the client's MHz as CPU quota, and its memory.
      resources {
        cpu    = 500
        memory = 256
      }
    }
  }
}
