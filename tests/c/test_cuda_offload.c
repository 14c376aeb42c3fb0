// sanitizers: tsan
// needs: c++
// stand-in only
/* Arrays of a device's rank in host memory: the bits of the CPU's run, whatever lives where; what
 * went up is waited for; and nothing is left of an allocation that fails. */
#include "device_program.h"

static const fs_precision *const precisions[] = {&fp32, &bf16, &split, &pure, &half};

static program
offloaded(int size, unsigned homes, int precision, fs_rule rule)
{
    program p = {.name = "offload", .size = size, .partition = FS_PARTITION_FLAT,
                 .policy = {1, false, FS_WEIGHTS_SHARD, 2, *precisions[precision], {0}, false},
                 .rule = rule, .steps = 2, .rounds = 2, .bad_step = -1};
    p.policy.on_host = (fs_on_host){(homes & 1) != 0, (homes & 2) != 0, (homes & 4) != 0};
    return p;
}

#define EACH (2 * ONE_CASE_IN) /* 2: every pair of classes and rule at one world or two */

/* Every set of classes, every rule and precision, at worlds 1 to 3; below stage 3 with weights that
 * stay on the device; and with every cut on every rank. */
static void
test_same_bits(void)
{
    int cases = 0;
    for (int size = 1; size <= 3; size++) {
        for (unsigned homes = 1; homes < 8; homes++) {
            for (int rule = 0; rule < FS_RULE_COUNT; rule++, cases++) {
                if (cases % EACH != 0) {
                    continue;
                }
                static outcome want, got;
                char name[80];
                program p = offloaded(size, homes, (cases + (int)homes) % 5, (fs_rule)rule);
                p.partition = (fs_partition)(cases % 2);
                p.max_norm = cases % 3 == 0 ? 0.5 : 0.0;
                if ((homes & 1) == 0 && cases % 2 == 0) {
                    p.policy.weights = FS_WEIGHTS_WHOLE;
                    p.policy.slot_per_unit = true;
                    p.policy.keep = cases % 4 == 0 ? size : 1;
                }
                (void)snprintf(name, sizeof name, "size %d homes %u rule %d case %d", size, homes,
                               rule, cases);
                p.name = name;
                must_run(&want, &p, NULL);
                fs_sim_reset((uint64_t)cases, cases % 2 == 0 ? FS_SIM_SHUFFLED : FS_SIM_LATE,
                             DEVICE_NBYTES);
                must_run(&got, &p, &device);
                check_same(&p, &got, &want);
                CHECK(got.verdicts[0].applied && got.verdicts[1].applied, "%s: skipped", p.name);
            }
        }
    }
}

static fs_layout *
make_layout(const program *p)
{
    fs_unit_def units[UNITS];
    fs_layout *layout;
    for (int u = 0; u < UNITS; u++) {
        units[u] = (fs_unit_def){params_of_model[u].name, u, u};
    }
    CHECK_OK(fs_layout_make(params_of_model, PARAMS, units, UNITS, p->size, p->partition,
                            p->policy.slot_per_unit, &layout));
    return layout;
}

/* What lives on the host is none of the device's; must_run compares the ledger with this plan. */
static void
test_plan(void)
{
    for (unsigned homes = 0; homes < 8; homes++) {
        program p = offloaded(2, homes, 1, FS_RULE_ADAMW);
        fs_layout *layout = make_layout(&p);
        fs_ledger plan = {0};
        CHECK_OK(fs_shards_plan(layout, &p.policy, 2, 0, true, &plan));
        static const struct {
            unsigned home;
            fs_mem_class memory_class;
        } classes[] = {{1, FS_MEM_WEIGHTS}, {2, FS_MEM_ACCUMULATORS}, {4, FS_MEM_MASTER},
                       {4, FS_MEM_MOMENTS}};
        for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
            fs_mem_class c = classes[i].memory_class;
            bool on_host = (homes & classes[i].home) != 0;
            CHECK((plan.nbytes[FS_HOME_DEVICE][c] == 0) == on_host &&
                      (plan.nbytes[FS_HOME_PRIVATE][c] > 0) == on_host,
                  "homes %u: %s: %zu bytes on the device, %zu on the host", homes,
                  fs_mem_class_name(c), (size_t)plan.nbytes[FS_HOME_DEVICE][c],
                  (size_t)plan.nbytes[FS_HOME_PRIVATE][c]);
        }
        p.policy.weights = FS_WEIGHTS_WHOLE;
        CHECK_STATUS(fs_shards_plan(layout, &p.policy, 2, 0, true, &plan),
                     (homes & 1) != 0 ? FS_EUNSUPPORTED : FS_OK);
        fs_layout_free(layout);
    }
}

// ---- waits --------------------------------------------------------------------------------------

static fs_event *of_copies; /* stands for what the copy stream was given */
static void (*real_record)(const fs_exec *, fs_event *);

static void
record_and_note(const fs_exec *exec, fs_event *event)
{
    if (exec->context == watched && (exec->stream == FS_STREAM_COPY || event == of_copies)) {
        of_copies = exec->stream == FS_STREAM_COPY ? event : NULL;
    }
    real_record(exec, event);
}

static void
after_but_one(const fs_exec *exec, fs_event *event)
{
    if (exec->context == watched && event == of_copies && ++waits_made == wait_left_out) {
        return;
    }
    real_after(exec, event);
}

/* Weights that went up are waited for, once a step; without that a run races. */
static void
test_waits(void)
{
    for (int i = 0; i < 8; i++) {
        /* State, and gradients too, on the host; a separate master, and a split one. */
        program p = offloaded(1 + i / 4, i % 2 == 0 ? 4 : 6, 1 + i % 4 / 2, FS_RULE_ADAMW);
        p.watch = watch;
        for (wait_left_out = 0; wait_left_out <= (size_t)p.steps; wait_left_out++) {
            static outcome out;
            waits_made = 0;
            of_copies = NULL;
            fs_sim_reset(wait_left_out + 1, FS_SIM_SHUFFLED, DEVICE_NBYTES);
            fs_sim_tolerate_races(true);
            must_run(&out, &p, &device);
            CHECK(waits_made == (size_t)p.steps, "%d: %zu waits", i, waits_made);
            CHECK((fs_sim_races() > 0) == (wait_left_out > 0), "%d: %zu races without wait %zu: %s",
                  i, fs_sim_races(), wait_left_out, fs_sim_latest_race());
        }
    }
    watched = NULL;
}

// ---- no room ------------------------------------------------------------------------------------

static size_t pinned_fails_at;
static _Atomic size_t pinned_n;
static fs_status (*real_pinned_open)(fs_context *, size_t, void **);

static fs_status
pinned_open_but_one(fs_context *context, size_t nbytes, void **out)
{
    /* The program's own room for what sums find is not the library's. */
    if (nbytes != sizeof(fs_sums) && ++pinned_n == pinned_fails_at) {
        return FS_FAIL(FS_ENOMEM, "no room for %zu bytes of pinned memory", nbytes);
    }
    return real_pinned_open(context, nbytes, out);
}

/* Whichever allocation on the host fails, all ranks fail, and nothing is left. */
static void
test_no_room(void)
{
    program p = offloaded(2, 7, 1, FS_RULE_ADAMW);
    for (pinned_fails_at = 1;; pinned_fails_at++) {
        atomic_store(&pinned_n, 0);
        fs_sim_reset(pinned_fails_at, FS_SIM_SHUFFLED, DEVICE_NBYTES);
        static outcome out;
        fs_status statuses[RANKS_MAX];
        run_program(&out, &p, &device, statuses);
        bool failed = pinned_fails_at <= atomic_load(&pinned_n);
        for (int r = 0; r < p.size; r++) {
            CHECK((statuses[r] != FS_OK) == failed, "allocation %zu: rank %d: %d", pinned_fails_at,
                  r, (int)statuses[r]);
        }
        if (!failed) {
            break;
        }
    }
    CHECK(pinned_fails_at > 4, "%zu allocations", pinned_fails_at - 1);
    pinned_fails_at = 0;
}

int
main(void)
{
    open_library();
    real_record = runtime.record;
    runtime.record = record_and_note;
    real_after = runtime.after;
    runtime.after = after_but_one;
    real_pinned_open = runtime.pinned_open;
    runtime.pinned_open = pinned_open_but_one;
    test_plan();
    test_same_bits();
    test_waits();
    test_no_room();
    return 0;
}
