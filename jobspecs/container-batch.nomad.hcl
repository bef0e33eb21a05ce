# One container sandbox per dispatch: `nomad job dispatch -meta command='make test' dsec-container-batch payload.txt`.
# The command's exit code, signal or OOM kill is the task's. For thousands of short sandboxes use the gateway: a dispatch
# is a Raft write, an evaluation and a plan.

variable "image" {
  type    = string
  default = "debian"
}

job "dsec-container-batch" {
  type = "batch"

  parameterized {
    payload       = "optional"
    meta_required = ["command"]
  }

  group "sandbox" {
    # A program that fails has failed: no second try by Nomad. A node without room is tried again elsewhere.
    restart {
      attempts = 0
      mode     = "fail"
    }

    reschedule {
      attempts  = 3
      interval  = "1h"
      delay     = "5s"
      unlimited = false
    }

    task "main" {
      driver = "dsec-container"

      dispatch_payload {
        file = "payload"
      }

      config {
        image   = var.image
        command = "sh"
        args    = ["-c", "${NOMAD_META_command}"]
        qos     = "best_effort"
      }

      resources {
        cpu    = 500
        memory = 256
      }
    }
  }
}
