// sanitizers: tsan
// needs: c++
// stand-in only
/* Shards on a device: the same program runs on the CPU's table and on a GPU's, over the stand-in,
 * and must give the same bits; in whatever order streams run, with no wait to spare, and to an end
 * whatever fails. */
#include "device_program.h"

static outcome
on_cpu(const program *p)
{
    static outcome out;
    must_run(&out, p, NULL);
    return out;
}

static outcome
on_device(const program *p, uint64_t seed, fs_sim_order order)
{
    static outcome out;
    fs_sim_reset(seed, order, DEVICE_NBYTES);
    must_run(&out, p, &device);
    return out;
}

/* Every stage, partition, rule, precision; parameters and units that are absent here and there,
 * other numbers of rounds on each rank, units out of turn, a gradient that is not finite. */
static void
test_same_bits(void)
{
    const fs_precision *precisions[] = {&fp32, &bf16, &split, &pure, &half};
    int cases = 0;
    for (int size = 1; size <= RANKS_MAX; size++) {
        const fs_policy policies[] = {
            {size, true, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
            {1, true, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
            {1, false, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
            {1, false, FS_WEIGHTS_SHARD, 2, fp32, {0}, false},
            {1, false, FS_WEIGHTS_SHARD, 0, fp32, {0}, false},
            {size / 2, false, FS_WEIGHTS_SHARD, 3, fp32, {0}, false},
            {size / 2, true, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
        };
        for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
            if (policies[i].keep < 1 || size % policies[i].keep != 0) {
                continue;
            }
            for (int style = (int)(i + (size_t)size) % 2; style < 4; style += 2, cases++) {
                if (cases % ONE_CASE_IN != 0) {
                    continue;
                }
                program p = {
                    .name = "case", .size = size, .policy = policies[i],
                    .partition = (fs_partition)(style % 2),
                    .rule = (fs_rule)(cases % FS_RULE_COUNT), .steps = size > 2 ? 2 : 3,
                    .rounds = 2,
                    .uneven = style >= 2, .shuffled = style == 1 || style == 2,
                    .max_norm = cases % 3 == 0 ? 0.5 : 0.0, .bad_step = cases % 4 == 1 ? 1 : -1,
                };
                char name[64];
                (void)snprintf(name, sizeof name, "size %d policy %zu style %d", size, i, style);
                p.name = name;
                p.policy.precision = *precisions[cases % 5];
                outcome want = on_cpu(&p);
                outcome got = on_device(&p, (uint64_t)cases,
                                        cases % 2 == 0 ? FS_SIM_SHUFFLED : FS_SIM_LATE);
                check_same(&p, &got, &want);
                if (p.bad_step >= 0 && !p.uneven) {
                    const fs_verdict *bad = &got.verdicts[p.bad_step];
                    CHECK(!bad->applied && bad->bad_param == BAD_PARAM &&
                              bad->bad_rank == size - 1,
                          "%s: bad %d %d", p.name, bad->bad_param, bad->bad_rank);
                }
            }
        }
    }
}

static program
prefetching(int size)
{
    return (program){.name = "prefetch", .size = size, .partition = FS_PARTITION_FLAT,
                     .policy = {1, false, FS_WEIGHTS_SHARD, 2, fp32, {0}, false},
                     .rule = FS_RULE_ADAMW, .steps = 2, .rounds = 1, .brief = true, .bad_step = -1};
}

/* Ranks that bring other numbers of micro-batches, none among them, through a pool: who is done
 * takes part in what the others still gather. */
static void
test_uneven_ranks_through_the_pool(void)
{
    for (int i = 0; i < 12; i += ONE_CASE_IN == 1 ? 1 : 5) {
        program p = {.name = "uneven, pool", .size = 2 + i % 3, .uneven = true, .reads = true,
                     .policy = {1, i % 4 == 3, FS_WEIGHTS_SHARD, i % 3 == 2 ? 0 : 2 + i % 2, bf16,
                                {0}, false},
                     .rule = FS_RULE_ADAMW, .steps = 3, .bad_step = -1};
        outcome want = on_cpu(&p);
        outcome got = on_device(&p, (uint64_t)i, i % 2 ? FS_SIM_SHUFFLED : FS_SIM_LATE);
        check_same(&p, &got, &want);
        for (int s = 0; s < p.steps; s++) {
            CHECK(want.verdicts[s].applied, "step %d of size %d", s, p.size);
        }
    }
}

/* The engine's own sum, in another order than that of ranks: the same bits where sums are exact, as
 * those of this program's gradients are while it does not read weights; and what is not finite has
 * the name of its parameter and of the rank that brought it. */
static void
test_ring(void)
{
    int cases = 0;
    for (int size = 1; size <= RANKS_MAX; size++) {
        for (int keep = 1; keep <= size; keep++) {
            for (int slots = 0; size % keep == 0 && slots < 2; slots++, cases++) {
                program p = {
                    .name = "ring", .size = size, .uneven = true, .shuffled = slots == 1,
                    .policy = {keep, slots == 1, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
                    .partition = cases % 2 == 0 ? FS_PARTITION_FLAT : FS_PARTITION_PER_PARAMETER,
                    .rule = FS_RULE_ADAMW, .steps = 3, .bad_step = cases % 3 == 0 ? 1 : -1,
                };
                outcome want = on_cpu(&p);
                p.policy.ring = true;
                outcome got = on_device(&p, (uint64_t)cases, FS_SIM_SHUFFLED);
                check_same(&p, &got, &want);
            }
        }
    }
    program p = prefetching(2);
    p.policy.ring = true;
    outcome out;
    fs_status statuses[RANKS_MAX];
    run_program(&out, &p, NULL, statuses);
    CHECK(statuses[0] == FS_EUNSUPPORTED && strstr(ranks[0].why.text, "reduce_order") != NULL,
          "a ring on the CPU: %d: %s", (int)statuses[0], ranks[0].why.text);
}

static void
test_schedules(void)
{
    for (int seed = 0; seed < 200; seed++) {
        program p = prefetching(2 + seed % 2);
        p.steps = 1;
        if (seed >= 2 && seed % ONE_CASE_IN != 0) {
            continue;
        }
        static outcome want[2];
        if (seed < 2) {
            want[seed] = on_cpu(&p);
        }
        outcome got =
            on_device(&p, (uint64_t)seed, seed % 4 < 2 ? FS_SIM_SHUFFLED : FS_SIM_LATE);
        check_same(&p, &got, &want[seed % 2]);
    }
}

/* Gradients that are kept, dropped, looked at, changed; a parameter that is frozen for a step. */
static void
test_edits(void)
{
    for (int size = 1; size <= 3; size++) {
        for (int keeps = 0; keeps < 2; keeps++) {
            fs_weights weights = keeps ? FS_WEIGHTS_WHOLE : FS_WEIGHTS_SHARD;
            program p = {.name = "edits", .size = size, .rule = FS_RULE_SGD, .steps = 3,
                         .rounds = 2, .policy = {1, keeps != 0, weights, 2, bf16, {0}, false},
                         .bad_step = -1, .edits = true, .keeps = keeps != 0};
            outcome want = on_cpu(&p);
            outcome got = on_device(&p, (uint64_t)size, FS_SIM_SHUFFLED);
            check_same(&p, &got, &want);
        }
    }
}

/* A rank whose batch fails anywhere goes with what its peers' devices still wait for. */
static void
test_skipped_batches(void)
{
    for (int after = 1; after < 8; after++) {
        program p = prefetching(2 + after % 2);
        p.rounds = 1 + after % 2;
        p.skips_after = after;
        outcome want = on_cpu(&p);
        CHECK(want.verdicts[1].reason == FS_SKIP_RANK, "reason %d", (int)want.verdicts[1].reason);
        for (uint64_t seed = 0; seed < (ONE_CASE_IN == 1 ? 4 : 1); seed++) {
            outcome got = on_device(&p, seed, seed % 2 ? FS_SIM_SHUFFLED : FS_SIM_LATE);
            check_same(&p, &got, &want);
        }
    }
}

// ---- waits --------------------------------------------------------------------------------------

static void
after_but_one(const fs_exec *exec, fs_event *event)
{
    if (exec->context == watched && ++waits_made == wait_left_out) {
        return;
    }
    real_after(exec, event);
}

/* Without any one of its waits a run races: none is there in vain. */
static void
test_every_wait_is_needed(void)
{
    const program programs[] = {
        prefetching(2),
        prefetching(1),
        {.name = "whole", .size = 2, .policy = {1, false, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
         .rule = FS_RULE_SGD, .steps = 2, .rounds = 1, .bad_step = -1},
        {.name = "uneven", .size = 2, .policy = {2, true, FS_WEIGHTS_WHOLE, 1, fp32, {0}, false},
         .rule = FS_RULE_SGD, .steps = 3, .uneven = true, .bad_step = -1},
        {.name = "ring", .size = 2, .policy = {2, true, FS_WEIGHTS_WHOLE, 1, fp32, {0}, true},
         .rule = FS_RULE_SGD, .steps = 2, .rounds = 1, .bad_step = -1},
    };
    size_t n = ONE_CASE_IN == 1 ? sizeof programs / sizeof programs[0] : 0;
    for (size_t i = 0; i < n; i++) {
        program p = programs[i];
        p.watch = watch;
        for (wait_left_out = 1;; wait_left_out++) {
            waits_made = 0;
            fs_sim_reset(wait_left_out, FS_SIM_SHUFFLED, DEVICE_NBYTES);
            fs_sim_tolerate_races(true);
            static outcome out;
            must_run(&out, &p, &device);
            size_t races = fs_sim_races() + out.ranks_differ;
            CHECK((races > 0) == (wait_left_out <= waits_made),
                  "%s: %zu races without wait %zu of %zu: %s", p.name, races, wait_left_out,
                  waits_made, fs_sim_latest_race());
            if (wait_left_out > waits_made) {
                break;
            }
        }
        CHECK(wait_left_out > 4, "%s: only %zu waits", p.name, wait_left_out - 1);
    }
    watched = NULL;
}

// ---- failures -----------------------------------------------------------------------------------

static size_t memory_fails_at;
static _Atomic size_t memories;
static fs_status (*real_memory_open)(fs_context *, const char *, size_t, void **);

static fs_status
memory_open_but_one(fs_context *context, const char *what, size_t nbytes, void **out)
{
    if (++memories == memory_fails_at) {
        return FS_FAIL(FS_ENOMEM, "%s: no room for %zu bytes", what, nbytes);
    }
    return real_memory_open(context, what, nbytes, out);
}

/* Whichever allocation fails, all ranks fail, and nothing is left. */
static void
test_no_room(void)
{
    program p = prefetching(2);
    for (memory_fails_at = 1;; memory_fails_at++) {
        atomic_store(&memories, 0);
        fs_sim_reset(memory_fails_at, FS_SIM_SHUFFLED, DEVICE_NBYTES);
        static outcome out;
        fs_status statuses[RANKS_MAX];
        run_program(&out, &p, &device, statuses);
        bool failed = memory_fails_at <= atomic_load(&memories);
        for (int r = 0; r < p.size; r++) {
            CHECK((statuses[r] != FS_OK) == failed, "memory %zu: rank %d: %d", memory_fails_at, r,
                  (int)statuses[r]);
        }
        CHECK(fs_sim_communicators() == 0, "%zu communicators", fs_sim_communicators());
        if (!failed) {
            break;
        }
    }
    CHECK(memory_fails_at > 4, "%zu allocations", memory_fails_at - 1);
    memory_fails_at = 0;
}

/* A rank that fails at any point ends the others' step: they neither hang nor leak. */
static void
test_a_peer_that_fails(void)
{
    for (int at = 0; at < 12; at += ONE_CASE_IN == 1 ? 1 : 4) {
        program p = prefetching(2 + at % 2);
        p.fails_at = at + 1;
        fs_sim_reset((uint64_t)at, at % 4 < 2 ? FS_SIM_SHUFFLED : FS_SIM_LATE, DEVICE_NBYTES);
        static outcome out;
        fs_status statuses[RANKS_MAX];
        run_program(&out, &p, &device, statuses);
        for (int r = 0; r < p.size; r++) {
            CHECK(statuses[r] == FS_ABORTED || (r == p.size - 1 && statuses[r] == FS_ESTATE),
                  "failure %d: rank %d: %d", at, r, (int)statuses[r]);
        }
        CHECK(fs_sim_communicators() == 0, "%zu communicators", fs_sim_communicators());
    }
}

/* Ranks that gather different units, or not as many, are told so: no device waits for ever. */
static void
test_other_gathers(void)
{
    for (int wrong = 1; wrong <= 2; wrong++) {
        program p = prefetching(2);
        p.wrong = wrong;
        fs_sim_reset((uint64_t)wrong, FS_SIM_SHUFFLED, DEVICE_NBYTES);
        static outcome out;
        fs_status statuses[RANKS_MAX];
        run_program(&out, &p, &device, statuses);
        for (int r = 0; r < p.size; r++) {
            const char *text = ranks[r].why.text;
            CHECK((statuses[r] == FS_EINVAL || statuses[r] == FS_ABORTED) &&
                      strstr(text, "all ranks gather the same units in the same order") != NULL,
                  "rank %d: %d: %s", r, (int)statuses[r], text);
            CHECK(wrong == 2 || (strstr(text, "u2") != NULL && strstr(text, "u3") != NULL),
                  "rank %d: %s", r, text);
        }
    }
}

int
main(void)
{
    open_library();
    real_after = runtime.after;
    runtime.after = after_but_one;
    real_memory_open = runtime.memory_open;
    runtime.memory_open = memory_open_but_one;
    test_same_bits();
    test_schedules();
    test_uneven_ranks_through_the_pool();
    test_ring();
    test_edits();
    test_skipped_batches();
    test_every_wait_is_needed();
    test_no_room();
    test_a_peer_that_fails();
    test_other_gathers();
    return 0;
}
