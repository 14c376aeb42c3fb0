/* What tests ask of the stand-in for CUDA, beyond CUDA's own functions.
 *
 * The stand-in ends the program, saying why on stderr, when code does what a GPU would punish or
 * silently get wrong: a barrier that not all threads of a block reach, a launch beyond the limits
 * of a device, writing beyond an allocation, an operation on the default stream, a copy that
 * touches memory nobody allocated. Device memory faults (SIGSEGV) when the host touches it while
 * nothing runs. Fresh device and shared memory holds NaN.
 *
 * Two operations that touch the same bytes, one of them writing, must be ordered by a stream, by
 * events, or by the host's waiting. That is decided when they are given, from the ranges they
 * declare and from vector clocks, so that a missing wait is found whatever order the worker happens
 * to take. */
#ifndef FS_CUDASIM_SIM_H
#define FS_CUDASIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0 where the same tests run on a real GPU (tests/cuda/real.c): they leave out what only the
 * stand-in can be made to do. */
#ifdef FS_REAL_GPU
#define FS_STAND_IN 0
#else
#define FS_STAND_IN 1
#endif

/* How the worker picks among operations that may run. */
typedef enum fs_sim_order {
    FS_SIM_SHUFFLED, /* at random */
    FS_SIM_LATE      /* at random, and none before the host waits for it */
} fs_sim_order;

/* Begins anew: seed for every choice; order; each device's memory in bytes. Nothing may be
 * running. */
void fs_sim_reset(uint64_t seed, fs_sim_order order, size_t device_nbytes);

/* How many devices there are, from now on; at first the variable CUDASIM_DEVICES says it, or it is
 * 8. Nothing may be running. */
void fs_sim_set_devices(int n);

/* Has any thread chosen or used the device since the reset? On a GPU that takes memory there. */
bool fs_sim_device_is_used(int device);

/* A race is counted, and its text kept, instead of ending the program: for tests of the
 * detector. */
void fs_sim_tolerate_races(bool tolerate);
size_t fs_sim_races(void);

/* Both operations of the latest race; empty when there was none. */
const char *fs_sim_latest_race(void);

/* The driver that fs_sim reports: 0 none, 12000 too old, 13000 right. */
void fs_sim_set_driver(int version);

/* The major version that cuBLAS reports; 13 at first. And its handles that are open. */
void fs_sim_set_cublas_version(int major);
size_t fs_sim_cublas_handles(void);

/* Kernels and products given since the reset. */
size_t fs_sim_kernels(void);

// ---- NCCL ---------------------------------------------------------------------------------------

/* Ranks that call different things, or use two communicators in different orders, are counted and
 * told to the communicator (the order alone is only counted), instead of ending the program. Counts
 * from zero. */
void fs_sim_tolerate_mismatches(bool tolerate);
size_t fs_sim_mismatches(void);
const char *fs_sim_latest_mismatch(void);

/* The communicators of a device have this error from now on (an ncclResult_t; 6: a peer is lost),
 * and what they have under way never ends. */
void fs_sim_fail_communicators(int device, int result);

/* Communicators that were neither destroyed nor aborted. */
size_t fs_sim_communicators(void);

/* The version that NCCL says it is: 21800 is 2.18.0. */
void fs_sim_set_nccl_version(int number);

#ifdef __cplusplus
}
#endif

#endif
