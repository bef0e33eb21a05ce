/* The loop's two ends, for serve.c only. */
#ifndef DSEC_LOOP_H
#define DSEC_LOOP_H
void loop_init(void);
int loop_run(void); /* until loop_stop; returns its status */
#endif
