"""What the PTX interpreter orders, and that it notices what nothing does: races and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.ptx import SCHEDULES, Deadlock, MemoryFault, Misaligned, PtxError, Race
from kernels.ptx.snippets import at, random_bytes, simulate

NO_CHECKS = {"check_races": False, "check_lanes": False}

EXCHANGE = """mov.b32 %r1, dynamic; mad.lo.s32 %r2, %r0, 4, %r1; ld.global.b32 %r3, [%rd11];
    st.shared.b32 [%r2], %r3; {between} xor.b32 %r4, %r0, {other}; mad.lo.s32 %r2, %r4, 4, %r1;
    ld.shared.b32 %r5, [%r2]; add.s64 %rd12, %rd1, %rd10; st.global.b32 [%rd12], %r5;"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("between", "other", "block"),
    [("bar.sync 0;", 127, 128), ("barrier.sync 3, 64;", 63, 64), ("bar.warp.sync -1;", 31, 128)],
)
def test_exchange_through_shared_memory(between, other, block, schedule):
    data, out = random_bytes(4 * block).view(np.uint32), np.zeros(block, np.uint32)
    code = at(4) + EXCHANGE
    arrays, options = [data, out], {"block": block, "schedule": schedule}
    simulate(code.format(between=between, other=other), arrays, **options)
    assert (out == data[np.arange(block) ^ other]).all()
    with pytest.raises(Race, match=r"was (read|written)"):
        simulate(code.format(between="", other=other), arrays, **options)
    simulate(code.format(between="", other=0), arrays, **options)  # each its own word
    if other > 31:
        with pytest.raises(Race):  # too narrow a barrier
            simulate(code.format(between="bar.warp.sync -1;", other=other), arrays, **options)


def test_write_after_read_in_shared_memory():
    """The second round overwrites what another warp may still read."""
    code = (
        at(4)
        + """mov.b32 %r1, dynamic; mad.lo.s32 %r2, %r0, 4, %r1; xor.b32 %r3, %r0, 32;
        mad.lo.s32 %r3, %r3, 4, %r1; st.shared.b32 [%r2], %r0; bar.sync 0;
        ld.shared.b32 %r4, [%r3]; {between} st.shared.b32 [%r2], %r4;"""
    )
    simulate(code.format(between="bar.sync 0;"), [np.zeros(64, np.uint32)], block=64)
    with pytest.raises(Race, match=r"was (read|written)"):
        simulate(code.format(between=""), [np.zeros(64, np.uint32)], block=64)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_warps_read_before_one_writes(schedule):
    """Each reader is ordered by its own barrier, however late the other warps read."""
    code = """mov.u32 %r0, %tid.x; ld.{space}.b32 %r2, [{word}]; setp.ge.u32 %p1, %r0, {met};
        @%p1 bra end; barrier.sync 0, {met}; setp.ne.u32 %p2, %r0, 0; @%p2 bra end;
        st.{space}.b32 [{word}], %r0; end:"""
    options = {"block": 96, "schedule": schedule}
    for space, word in (("shared", "dynamic"), ("global", "%rd0")):
        simulate(code.format(space=space, word=word, met=96), [np.zeros(1, np.uint32)], **options)
        with pytest.raises(Race):  # the third warp does not meet the others
            simulate(
                code.format(space=space, word=word, met=64), [np.zeros(1, np.uint32)], **options
            )


def test_races_in_global_memory():
    mark = "mov.u32 %r1, %ctaid.x; "
    same = mark + "st.global.b32 [%rd0], 7;"
    data = np.zeros(64, np.uint32)
    simulate(same, [data], grid=3)
    with pytest.raises(Race, match="was written by CTA"):
        simulate(mark + "st.global.b32 [%rd0], %r1;", [data], grid=2)
    with pytest.raises(Race, match="different values"):
        simulate("mov.u32 %r1, %laneid; st.global.b32 [%rd0], %r1;", [data])
    read = mark + "setp.eq.b32 %p1, %r1, 0; @%p1 ld.global.b32 %r2, [%rd0];"
    with pytest.raises(Race, match="CTA"):  # one reads what the other writes, in any order
        simulate(read + "@!%p1 st.global.b32 [%rd0], 9;", [data], grid=2)
    with pytest.raises(Race, match="same launch"):
        simulate(at(4) + "st.global.b32 [%rd11], 7; ld.global.nc.b32 %r1, [%rd11];", [data])
    turn = at(4) + "st.global.b32 [%rd11], %r0; {} ld.global.b32 %r1, [%rd0+128];"
    simulate(turn.format("bar.sync 0;"), [data], block=64)
    with pytest.raises(Race):
        simulate(turn.format(""), [data], block=64)


COPY = (
    at(16)
    + """mov.b32 %r1, dynamic; mad.lo.s32 %r1, %r0, 16, %r1;
    cp.async.{how} [%r1], [%rd11], {size}; {wait}
    ld.shared.v2.b64 {{%rd20, %rd21}}, [%r1];
    add.s64 %rd12, %rd1, %rd10; st.global.v2.b64 [%rd12], {{%rd20, %rd21}};"""
)
WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_copy(schedule):
    data, out = random_bytes(64 * 16).reshape(64, 16), np.zeros((64, 16), np.uint8)
    options = {"block": 64, "schedule": schedule}

    def copy(size="16, 16", wait=WAIT, how="cg.shared.global.L2::128B", **more):
        simulate(COPY.format(how=how, size=size, wait=wait), [data, out], **options, **more)
        return out

    assert (copy() == data).all()
    assert (copy(wait="cp.async.wait_all;") == data).all()
    zeros = copy(size="16, 5")
    assert (zeros[:, :5] == data[:, :5]).all()
    assert not zeros[:, 5:].any()
    assert not copy(size="16, 0").any()
    small = "ca.shared.global"
    assert (copy(size="8", how=small)[:, :8] == data[:, :8]).all()
    for missing in ("", "cp.async.commit_group;", "cp.async.wait_group 0;"):
        with pytest.raises(Race, match="asynchronously"):
            copy(wait=missing)
    if schedule == "lowest":  # late copies
        assert not (copy(wait="", **NO_CHECKS) == data).all(axis=1).any()


def test_asynchronous_groups():
    """``wait_group 1`` waits for all but the last group of the lane."""
    data, out = random_bytes(512).view(np.uint32), np.zeros((2, 32), np.uint32)
    code = (
        at(8)
        + """mov.b32 %r1, dynamic; mad.lo.s32 %r1, %r0, 8, %r1;
        cp.async.ca.shared.global [%r1], [%rd11], 4; cp.async.commit_group;
        cp.async.ca.shared.global [%r1+4], [%rd11+4], 4; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.b32 %r2, [%r1+{first}];
        cp.async.wait_group 0; ld.shared.b32 %r3, [%r1+4];"""
    )
    code += at(4, 1) + "st.global.b32 [%rd11], %r2; st.global.b32 [%rd11+128], %r3;"
    for seed in range(3):
        simulate(code.format(first=0), [data, out], seed=seed)
        assert (out == data[:64].reshape(32, 2).T).all()
        with pytest.raises(Race, match="asynchronously"):
            simulate(code.format(first=4), [data, out], seed=seed)


BULK = """mov.b32 %r1, dynamic; setp.ne.b32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; READY: {sync}
    @%p1 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {bytes};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+{to}], [%rd0], %r50,
        [%r1];
    WAIT: {wait} mad.lo.s32 %r2, %r0, 16, %r1;
    ld.shared.v2.b64 {{%rd20, %rd21}}, [%r2+128]; st.shared.v2.b64 [%r2+2048], {{%rd21, %rd20}};
    fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1+2048], %r50;
    cp.async.bulk.commit_group; {read} st.shared.b32 [%r1+2048], 5; END:"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copies(schedule):
    """In on an mbarrier, each lane turns 16 bytes round, out in a group."""
    data, out = random_bytes(1024), np.zeros(1024, np.uint8)
    loop = "{ .reg .pred P; L: mbarrier.try_wait.parity.shared.b64 P, [%r1], 0, 1000; @P bra D;"
    right = {"sync": "bar.sync 0;", "bytes": 1024, "to": 128, "wait": loop + " bra.uni L; D: }"}
    right["read"] = "cp.async.bulk.wait_group.read 0;"

    def copy(nbytes=1024, **change):
        code = at(16) + BULK.format(**right | change)
        simulate(code, [data, out], block=64, values=[nbytes], schedule=schedule)

    copy()
    assert (out.reshape(64, 2, 8) == data.reshape(64, 2, 8)[:, ::-1]).all()
    with pytest.raises(Race, match=r"asynchronously|was read|was written"):
        copy(wait="")
    with pytest.raises(Race):
        copy(read="")
    with pytest.raises(Deadlock, match="try_wait"):
        copy(bytes=1040)
    with pytest.raises(PtxError, match=r"no mbarrier|nothing orders"):
        copy(sync="")
    with pytest.raises(Misaligned):
        copy(nbytes=1000, bytes=1000)
    with pytest.raises(Misaligned):
        copy(to=136)
    with pytest.raises(MemoryFault):
        copy(nbytes=1040, bytes=1040)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_deadlocks(schedule):
    for code in (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra END; bar.sync 0, 64; END:",  # one warp stays away
        "setp.lt.u32 %p1, %r0, 40; @%p1 bar.sync 0;",  # half a warp
    ):
        with pytest.raises(Deadlock, match=r"bar\.sync"):
            simulate(at(4) + code, [np.zeros(64, np.uint32)], block=64, schedule=schedule)
    # Warps that have left do not count where no number is given.
    ended = "setp.lt.u32 %p1, %r0, 32; @%p1 bra END; bar.sync 0; END:"
    simulate(at(4) + ended, [np.zeros(64, np.uint32)], block=64, schedule=schedule)


def test_lane_checks_can_be_left_out():
    """Lanes of a warp then count as one; other warps still do not."""
    data, out = random_bytes(256).view(np.uint32), np.zeros(64, np.uint32)
    code = at(4) + EXCHANGE
    simulate(code.format(between="", other=3), [data, out], block=64, check_lanes=False)
    assert (out == data[np.arange(64) ^ 3]).all()
    with pytest.raises(Race):
        simulate(code.format(between="", other=35), [data, out], block=64, check_lanes=False)


def test_bulk_store_must_be_waited_for():
    code = """mov.b32 %r1, dynamic; st.shared.v2.b64 [%r1], {%rd0, %rd0};
        cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 16;"""
    simulate(
        code + "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", [np.zeros(2)], block=1
    )
    with pytest.raises(PtxError, match="exits while its bulk copy"):
        simulate(code, [np.zeros(2)], block=1)
