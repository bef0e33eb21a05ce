"""The repository that the agents repair, as the files of each commit, and the programs that run inside the sandbox."""
