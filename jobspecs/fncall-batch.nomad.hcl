# One stateless call per dispatch: the payload (at most 16 KiB) is its stdin, stdout is in the logs, the last line of
# stderr is the verdict. `nomad job dispatch -meta script='read x; echo $x' dsec-fncall-batch payload.txt`.

variable "image" {
  type    = string
  default = "debian"
}

job "dsec-fncall-batch" {
  type = "batch"

  parameterized {
    payload       = "optional"
    meta_required = ["script"]
  }

  group "call" {
    # A call that was lost with its node daemon may simply run again: it has no state.
    restart {
      attempts = 1
      interval = "10m"
      delay    = "1s"
      mode     = "fail"
    }

    task "call" {
      driver = "dsec-fncall"

      dispatch_payload {
        file = "stdin"
      }

      config {
        image      = var.image
        args       = ["sh", "-c", "${NOMAD_META_script}"]
        stdin_file = "local/stdin"
        cpu_s      = 10
        wall_s     = 20
      }

      # memory is the call's limit; cpu only what the scheduler counts.
      resources {
        cpu    = 200
        memory = 128
      }
    }
  }
}
