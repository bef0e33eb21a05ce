"""A quota's numbers are refused at the door, by name, when the database could not hold them."""

import msgspec
import pytest

from nomad_dsec.gateway.quotas import Quota


@pytest.mark.parametrize("field", ["sandboxes", "memory_mib", "disk_mib"])
def test_a_quota_past_64_bits_is_refused_by_name(field):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(f'{{"{field}": {2**64}}}', type=Quota)
    assert getattr(msgspec.json.decode(f'{{"{field}": {2**53}}}', type=Quota), field) == 2**53
