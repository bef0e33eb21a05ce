/* What serve.c knows of the whole. */
#ifndef DSEC_SERVE_H
#define DSEC_SERVE_H
#include <stdint.h>
const uint8_t *serve_boot_id(void);
void serve_conn_closed(unsigned left);
#endif
