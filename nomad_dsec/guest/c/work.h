/* Inside a worker: one process for one file verb, speaking frames over a seqpacket socket to PID 1, which relays them.
 * Blocking calls are fine here. When PID 1 hangs up the work is given up: clean-up runs and the process ends. */
#ifndef DSEC_WORK_H
#define DSEC_WORK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "frame.h"

extern struct buffer work_out; /* the frame being built; work_send() sends and empties it */
extern int work_root;	       /* O_PATH descriptor of the root of all paths */
extern int work_fd;
extern void (*work_abandon)(void); /* undo half-made things; called before any unsuccessful end */

_Noreturn void work_main(int fd, uint8_t type, struct span payload);
void work_send(void);
/* As work_send(), but waits for credit first and takes it by the payload's size. */
void work_send_credited(void);
void work_data(const uint8_t *bytes, size_t n); /* n <= MAX_DATA, credited */
/* The next DATA: its bytes stay valid until the next call. Size 0: the host has said DATA_END. */
struct span work_receive(void);
void work_wait(int fd); /* until fd is readable; what the host says meanwhile is dealt with */
_Noreturn void work_ok(void);	/* a plain OK */
_Noreturn void work_done(void); /* the final frame has been sent */
_Noreturn void work_fail(const char *code, const char *field, int error, const char *message);
_Noreturn void work_fail_errno(const char *field, int error);

/* path.c: kernel-resolved paths. All return -1 and errno, or a descriptor. */
int path_open(const char *path, uint64_t flags, unsigned mode);
int path_open_below(int dir, const char *path, uint64_t flags, unsigned mode);
/* Parent directory (O_PATH) and last name of a path; ENOTEMPTY-free: "/", "." and ".." as last name are EINVAL. */
int path_parent(const char *path, char name[256], bool make_parents);
int path_dirs(const char *path); /* mkdir -p, then the directory as O_PATH */
/* Follow symlinks in the last component by hand, so that a new file appears where the link points. */
bool path_final(char path[4096]);
void path_field(struct span payload, uint16_t tag, char out[4096]); /* ends the work when missing or malformed */
const char *error_code(int error);
void temp_name(char name[32]);
ssize_t write_all(int fd, const uint8_t *bytes, size_t n);
void put_entry(const char *name, const struct stat *st, int dir); /* dir, name: for the target of a symlink */
const char *mode_kind(mode_t mode);
int remove_tree(int dir, const char *name); /* whatever it is; 0, or -1 and errno */

/* verbs */
_Noreturn void file_read(struct span payload);
_Noreturn void file_list(struct span payload);
_Noreturn void file_stat(struct span payload);
_Noreturn void file_mkdir(struct span payload);
_Noreturn void file_remove(struct span payload);
_Noreturn void file_chmod(struct span payload);
_Noreturn void file_write(struct span payload);
_Noreturn void file_move(struct span payload);
_Noreturn void tree_download(struct span payload);
_Noreturn void tree_upload(struct span payload);
_Noreturn void file_watch(struct span payload);
_Noreturn void clock_set(struct span payload);
_Noreturn void reseed(struct span payload);
_Noreturn void policy_probe(struct span payload);

#endif
