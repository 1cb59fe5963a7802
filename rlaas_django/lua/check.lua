--[[
  Decides every policy of one request, all or nothing: each is checked, and all are charged only if
  every enforced one passes. A shadow policy is charged when it passes too, and never refuses.
  Version  3

  KEYS   one per policy, then the overrides of the identity that all policies count, or else of each policy's:
         a HASH, <policy, or * for all> -> <kind>:<until>:<limit>
  ARGV   now, unique (tells this request from all others), cost, charge ('1'; '0' looks and touches nothing),
         then for each policy: algorithm, limit, window in ms, capacity, shadow ('1' or '0'), name
  reply  {now, then for each policy: allowed, current_count, remaining, retry_after, reset_after, limit, charged_at}
         times in ms; retry_after -1 is never; charged_at -1 is not charged

  Where `-->` names a section, scripts.py puts in that section of the algorithm's file:
    state    the locals that last from check to charge
    check    sets count, and reset_after (nil: look tells it)     (charges nothing; unless charge, writes nothing)
    wait     sets retry_after, of a cost that can fit but does not yet
    charge   sets reset_after and charged_at
    look     sets a reset_after that is nil, as nothing is charged
]]
local number = (#ARGV - 4) / 6

-- Decides a policy and those after it, and whether all pass. What a policy's check finds waits in its locals until the
-- others are checked. All it needs is handed to it: a function that refers to what is around it takes longer to make.
local function decide(decide, i, number, pass, call, now, at, unique, cost, charge, override, reply)
  local ARGV, word, row = ARGV, 6 * i - 1, 7 * i - 5
  local algorithm, key, limit, window = ARGV[word], KEYS[i], ARGV[word + 1] + 0, ARGV[word + 2] + 0
  local capacity = ARGV[word + 3] == ARGV[word + 1] and limit or ARGV[word + 3] + 0
  local kind, ends, other
  if override then
    kind, ends, other = override(KEYS[number + i] or KEYS[number + 1], ARGV[word + 5])
    if kind == "limit" then
      limit, capacity = other, other
    end
  end

  local count, reset_after
  --> state
  --> check
  local remaining, retry_after, charged_at = capacity - count, 0, -1
  local allowed = cost <= remaining
  if not allowed then
    if cost > capacity then
      retry_after = -1
    else
      --> wait
    end
    if remaining < 0 then
      remaining = 0
    end
  end
  if kind == "block" then
    allowed, remaining, retry_after = false, 0, ends - now
  elseif kind == "exempt" then
    allowed, retry_after = true, 0
  end

  pass = pass and (allowed or ARGV[word + 4] == "1")
  reply[row], reply[row + 1], reply[row + 2], reply[row + 3] = allowed and 1 or 0, count, remaining, retry_after
  reply[row + 4], reply[row + 5], reply[row + 6] = reset_after, capacity, -1
  if i < number then
    pass = decide(decide, i + 1, number, pass, call, now, at, unique, cost, charge, override, reply)
  end

  if charge and pass and allowed and kind ~= "exempt" then
    --> charge
    reply[row + 2], reply[row + 4], reply[row + 6] = remaining - cost, reset_after, charged_at
  elseif not reset_after then
    --> look
    reply[row + 4] = reset_after
  end
  return pass
end

local override
if call("EXISTS", unpack(KEYS, number + 1)) > 0 then
  -- What an operator made hold for this identity instead: block, exempt or limit; until when; and the limit.
  override = function(key, name)
    for _, found in ipairs(call("HMGET", key, name, "*")) do
      local kind, ends, limit = string.match(found or "", "^(%a+):(%d+):(%d*)$")
      if kind and tonumber(ends) > now then
        return kind, tonumber(ends), tonumber(limit)
      end
    end
  end
end

-- Room for three policies at once: a table that grows is copied each time.
local reply = { now, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil }
decide(decide, 1, number, true, call, now, at, ARGV[2], ARGV[3] + 0, ARGV[4] == "1", override, reply)
return reply
